"""Faults on purpose: a proxy that harms, a run with killed servers, a run for hours."""
