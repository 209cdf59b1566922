"""A suite of prompts by kind of work, and the comparison of ways to decode on each kind."""
