"""Batch files: requests in a file, answered line by line, in order.

lines.py    a line of the file, and its request
output.py   the files of answers, which can be continued after the process was ended at any point
running.py  answer lines, several at a time, with the server's application but without a network
cluster.py  the same on the machines of a Ray cluster
"""
