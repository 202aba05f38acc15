"""Gateways in front of two pairs: real smg, HAProxy and nginx over routers and simulated servers."""
