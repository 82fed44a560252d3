"""What an operator sees: logs, metrics, the admin port."""
