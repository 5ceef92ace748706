"""Keys and values of prompt prefixes on disk, in a folder that servers share."""
