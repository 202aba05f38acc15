"""The Grafana dashboard as code: `python -m deploy.grafana.dashboard` writes its JSON."""
