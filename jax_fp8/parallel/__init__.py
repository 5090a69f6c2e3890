"""How a step lies on several devices: the axes of a mesh, where params are, and what moves between them."""
