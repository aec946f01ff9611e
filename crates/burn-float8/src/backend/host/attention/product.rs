//! Products of strided matrices, on one core.

/// A matrix with strides of rows and columns, in elements.
#[derive(Clone, Copy)]
pub(super) struct Matrix<'a> {
    pub(super) values: &'a [f32],
    pub(super) row: usize,
    pub(super) column: usize,
}

impl<'a> Matrix<'a> {
    /// Contiguous rows of `columns` elements.
    pub(super) fn of(values: &'a [f32], columns: usize) -> Self {
        Self { values, row: columns, column: 1 }
    }

    pub(super) fn transposed(self) -> Self {
        Self { row: self.column, column: self.row, ..self }
    }

    /// Number of elements from the first to the last.
    fn reach(&self, [rows, columns]: [usize; 2]) -> usize {
        if rows == 0 || columns == 0 { 0 } else { (rows - 1) * self.row + (columns - 1) * self.column + 1 }
    }
}

/// Treatment of a product's old values.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Keep {
    Nothing,
    Sum,
}

/// c `[m, n]`, with row stride `row`, is set to or increased by `factor · a [m, k] · b [k, n]`.
pub(super) fn multiply(
    c: &mut [f32],
    row: usize,
    keep: Keep,
    factor: f32,
    a: Matrix<'_>,
    b: Matrix<'_>,
    [m, n, k]: [usize; 3],
) {
    let reach = Matrix { values: &[], row, column: 1 }.reach([m, n]);
    assert!(reach <= c.len() && a.reach([m, k]) <= a.values.len() && b.reach([k, n]) <= b.values.len(), "inside");
    // SAFETY: no element is outside of its slice, and `c` is borrowed exclusively.
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            c.as_mut_ptr(),
            1,
            row as isize,
            keep == Keep::Sum,
            a.values.as_ptr(),
            a.column as isize,
            a.row as isize,
            b.values.as_ptr(),
            b.column as isize,
            b.row as isize,
            1.0,
            factor,
            false,
            false,
            false,
            gemm::Parallelism::None,
        );
    }
}

/// c `[n]` += `a [k] · b [k, n]`. The elements of a row of b are contiguous. [`multiply`] would
/// pack b for this single row.
#[inline(always)]
pub(super) fn add_row(c: &mut [f32], a: &[f32], b: Matrix<'_>) {
    /// Sums that stay in registers.
    const BLOCK: usize = 64;
    assert_eq!(b.column, 1, "rows lie side by side");
    let (blocks, rest) = c.as_chunks_mut::<BLOCK>();
    let in_blocks = blocks.len() * BLOCK;
    for (i, c) in blocks.iter_mut().enumerate() {
        let mut sums = *c;
        for (row, a) in a.iter().enumerate() {
            let b: &[f32; BLOCK] = b.values[row * b.row + i * BLOCK..].first_chunk().expect("inside");
            for (sum, b) in sums.iter_mut().zip(b) {
                *sum += a * b;
            }
        }
        *c = sums;
    }
    for (row, a) in a.iter().enumerate() {
        for (c, b) in rest.iter_mut().zip(&b.values[row * b.row + in_blocks..]) {
            *c += a * b;
        }
    }
}
