"""Several cards as one: which dimension of what is split over them."""
