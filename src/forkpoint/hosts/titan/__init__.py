"""Support for models of torchtitan. It does not import torchtitan."""
