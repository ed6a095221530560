"""The dashboard and the rules of deploy/dashboards, against a real Prometheus."""
