"""What a transformer layer does between its matrix products and its attention: a kernel and its reference each."""
