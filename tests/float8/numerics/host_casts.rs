//! Casts on the host of values of every kind, in each layout: the reference's codes and scales, bit
//! for bit.
use burn::tensor::{DType, s};
use burn_float8::backend::HostCodes;
use kernel_tests::{HostMatrix, casts};
use test_data::{Random, transpose};

use crate::support::operand::{quantize, tensor};
use crate::support::runtime::Flex;

/// More elements than two tasks take.
const LARGE: [usize; 2] = [261, 269];
const SMALL: [[usize; 2]; 3] = [[1, 140], [37, 3], [130, 47]];

#[test]
fn casts_on_the_host_are_the_references() {
    for (i, cast) in casts().enumerate() {
        for (dtype, shape @ [rows, cols]) in [(DType::F32, LARGE), (DType::BF16, SMALL[i % SMALL.len()])] {
            // Values that bf16 represents. The quiet bit keeps NaN a NaN.
            let truncate = |x: f32| f32::from_bits(if x.is_nan() { 0x7fc0_0000 } else { x.to_bits() & 0xffff_0000 });
            let mut x = Random::new(i as u64).spiced(rows * cols, 100);
            if dtype == DType::BF16 {
                x.iter_mut().for_each(|x| *x = truncate(*x));
            }
            let dense = tensor::<Flex, 2>(x.clone(), shape).cast(dtype);
            let flipped = transpose(&x, shape);
            let transposed = tensor::<Flex, 2>(flipped.clone(), [cols, rows]).cast(dtype).transpose();
            let area = s![2..rows + 2, 1..cols + 1];
            let wide = tensor::<Flex, 2>(vec![f32::NAN; (rows + 3) * (cols + 2)], [rows + 3, cols + 2]).cast(dtype);
            let sliced = wide.slice_assign(area, dense.clone()).slice(area);
            for (layout, t) in [("dense", dense), ("transposed", transposed), ("sliced", sliced)] {
                let operands = [(&x, shape), (&flipped, [cols, rows])];
                for (ours, (x, shape)) in quantize(t, cast).into_iter().zip(operands) {
                    let HostCodes { codes, inv_scales, dims, format, granularity, .. } = ours;
                    let ours = HostMatrix { codes, inv_scales, shape: dims, format, granularity };
                    let same = ours.must_be(&HostMatrix::cast(x, shape, cast));
                    same.unwrap_or_else(|failure| panic!("{layout} {shape:?} {dtype:?} {cast:?}: {failure}"));
                }
            }
        }
    }
}
