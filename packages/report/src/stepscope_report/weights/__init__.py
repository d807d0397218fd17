"""Weight synchronisation: the way of new weights from the trainer to the engines."""
