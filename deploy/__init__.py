"""What runs Crossover: containers, dashboards, manifests. Nothing here is part of the package."""
