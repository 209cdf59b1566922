"""Helpers of tests/core/test_rope.py and its neighbours."""

LIMIT = 24
LONGROPE = {
    "rope_parameters": {
        "rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": LIMIT,
        "short_factor": [1.0, 1.1, 1.4, 2.0], "long_factor": [1.2, 4.0, 9.0, 25.0],
    },
    "original_max_position_embeddings": LIMIT, "max_position_embeddings": 96, "tie_word_embeddings": False,
}  # fmt: skip
DYNAMIC = {
    "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
    "max_position_embeddings": 32, "tie_word_embeddings": False,
}  # fmt: skip
