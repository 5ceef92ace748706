"""`tune-config --rehearse`: a server's last hour again, on simulated time, under other settings."""
