"""Other engines as variants: how a server is launched, and which kernel it really used."""
