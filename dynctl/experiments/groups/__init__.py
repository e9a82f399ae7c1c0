"""The groups of `dynctl test`: each sends its requests, then its checks judge the replies."""
