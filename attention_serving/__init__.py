"""The packages of this repository under one name; each is a link to its folder in the root."""
