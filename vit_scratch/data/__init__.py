"""Images from torchvision, scikit-learn or the user's folders: reading, splitting, augmenting, batching."""
