"""What `inspect` reports as suspicious in a checkpoint."""
