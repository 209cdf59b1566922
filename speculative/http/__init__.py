"""An HTTP server in the shapes of OpenAI's API, over the decoder's service; needs `pip install '.[serve]'`."""
