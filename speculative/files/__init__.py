"""Files that others wrote: what is not as expected is refused by name before anything is made of it."""
