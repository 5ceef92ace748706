"""Keys and values of prompts' beginnings on disk: in a folder that servers of one host share, and in packs."""
