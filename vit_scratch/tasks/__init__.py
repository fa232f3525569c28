"""What a run does from end to end: the only place where a model, its data, its loss and its metrics meet."""
