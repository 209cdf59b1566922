"""The shapes of drafted trees: `TokenTree`, and which tree is best for an acceptance that was measured."""
