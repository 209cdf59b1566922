"""Bodies of requests: what their parts may say, of which types, and within which bounds.

fields.py    the base of all bodies, and fields that are known and refused
sampling.py  the options of sampling
messages.py  the messages of a conversation, and tools
formats.py   the form that a text must have
"""
