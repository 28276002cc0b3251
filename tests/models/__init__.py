"""Models of the wild: what people train, in small. Bit for bit the run without the callback, and how much was captured."""
