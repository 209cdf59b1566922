"""Read files that others wrote. Invalid content is refused, with its name, before it is used."""
