"""Models whose weights are split over several processes, which are called ranks."""
