"""An HTTP server with OpenAI's API on top of the decoder's service; needs `pip install '.[serve]'`."""
