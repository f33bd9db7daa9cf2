"""Which loss trains the better draft tree: the same warm start, data, steps and anchors for each, judged on held-out prompts."""
