"""The stack of compose.yaml on a real Docker engine: `make compose-test`, never `make test`."""
