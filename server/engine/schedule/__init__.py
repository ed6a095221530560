"""What runs next: queue, batches, cost of waiting, fair shares, threads."""
