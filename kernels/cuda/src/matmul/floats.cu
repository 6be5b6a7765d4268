// Products with matrices of 8-bit floats. format.cuh, product.cuh and exact.cuh precede this text.

PRODUCT_KERNEL(mul_1, 1, 2, multiply_exactly<1>)
PRODUCT_KERNEL(mul_4, 4, 1, multiply_exactly<4>)
