"""Crossover: routes each request to the speculative or the baseline SGLang server of a pair."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("crossover-router")
except PackageNotFoundError:  # a checkout that was never installed
    __version__ = "0+unknown"
