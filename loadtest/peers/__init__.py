"""Install and start peers to compare with, each in a virtual environment of its own; Tandem depends on none of them."""
