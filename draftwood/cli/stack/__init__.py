"""The three services as child processes: started in order, supervised, stopped."""
