"""The kinds of call, above any transport and below any service."""
