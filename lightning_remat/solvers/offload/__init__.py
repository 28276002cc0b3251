"""The third choice: a tensor waits on the host, copied there and back beside the ops."""
