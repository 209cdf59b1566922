"""Models whose weights are split over several processes, called ranks."""
