"""Trees while they are drafted: levels are placed or grown, and a grown tree is assembled."""
