"""The shapes of drafted trees: `TokenTree`, and which tree pays best for an acceptance that was measured."""
