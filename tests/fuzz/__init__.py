"""Bytes and events that nobody chose: targets for a fuzzer, and the whole router against a model."""
