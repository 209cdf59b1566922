"""Files of requests, answered line by line in their order.

lines.py    a line, and what it asks for
output.py   the files of answers, which go on after a process was ended anywhere
running.py  lines to answers, as many at a time as is worth it; by the application of the server, without a network
cluster.py  the same on the machines of a Ray cluster
"""
