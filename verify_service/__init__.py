"""The verify service: holds the target model, checks draft trees in one pass, commits the accepted path."""
