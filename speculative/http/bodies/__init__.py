"""Bodies of requests: their fields, types and bounds.

fields.py    the base of all bodies, and fields that are known but refused
sampling.py  sampling options
messages.py  messages of a conversation, and tools
formats.py   structured output
"""
