"""What the driver calls: captures, their preparation, configuration and results."""
