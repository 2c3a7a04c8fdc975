"""What runs on the other side of the socket, never imported by the library.

`zygote.py` is started by its path under a bare interpreter (`python -S -P`), so
the files of this folder import the standard library and each other only.
"""
