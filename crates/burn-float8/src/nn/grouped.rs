//! [`grouped_linear`]: the linears of all experts of a mixture in one call. [`GroupedLinear`]:
//! their weights as one parameter, which [`Float8Config::apply`](crate::Float8Config::apply) tags.
use burn::module::{Module, Param};
use burn::nn::Initializer;
use burn::tensor::backend::Backend;
use burn::tensor::{Int, Tensor, TensorPrimitive};

use super::experts::{Dispatched, dispatch};
use crate::backend::{check_shapes, grouped_matmul};
use crate::ops::functions::find;

/// y `[M, N]`: each row of x `[M, K]` times its group's weight in `weight: [G, K, N]`.
///
/// Group `g` is the rows `ends[g - 1]..ends[g]`, from 0 for the first. `ends: [G]` is ascending.
/// Rows after the last end are zero in y.
///
/// The three GEMMs run in FP8 by the recipe of the weight's layer and count in its report, like the
/// GEMMs of a linear. With one scale per tensor, all groups share it, and rows outside of the
/// groups may affect it. FP8 GEMMs read nothing from the device for any group sizes. A GEMM in high
/// precision is one matmul per group and reads the ends. On a backend without
/// [`Float8`](crate::Float8) this calls [`grouped_matmul`].
///
/// If ranks divide the experts, the rows go to the ranks of their experts and back, unless
/// [`dispatch`](crate::nn::dispatch) has sent them there.
///
/// The weight of a [`GroupedLinear`](crate::GroupedLinear) gets its layer from
/// [`Float8Config::apply`](crate::Float8Config::apply). Any other weight uses the device's default,
/// like an untagged linear.
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::backend::{Autodiff, Flex};
/// use burn::tensor::{Int, Tensor};
/// type B = burn_float8::Float8<Autodiff<Flex>>;
///
/// let device = Default::default();
/// let x = Tensor::<B, 2>::ones([5, 32], &device);
/// let w = Tensor::<B, 3>::ones([3, 32, 16], &device).require_grad();
/// // Two rows for the first expert, none for the second, three for the third.
/// let ends = Tensor::<B, 1, Int>::from_ints([2, 2, 5], &device);
/// let y = burn_float8::grouped_linear(x, w.clone(), ends);
/// assert_eq!(y.dims(), [5, 16]);
/// assert_eq!(w.grad(&y.sum().backward()).unwrap().dims(), [3, 32, 16]);
/// # }
/// ```
///
/// # Panics
///
/// If the shapes do not match. Also in strict mode if a GEMM cannot run in FP8, and if the weight
/// has no layer and the configuration makes that an error.
pub fn grouped_linear<B: Backend>(x: Tensor<B, 2>, weight: Tensor<B, 3>, ends: Tensor<B, 1, Int>) -> Tensor<B, 2> {
    let Some(functions) = find::<B>() else { return grouped_matmul(x, weight, ends) };
    if ends.dims()[0] != weight.dims()[0] {
        // Ranks may divide the experts.
        let Dispatched { x, ends, route } = dispatch(x.clone(), ends.clone(), &weight);
        if route.is_over_ranks() {
            return route.combine(grouped_linear(x, weight, ends));
        }
    }
    check_shapes(&x, &weight, &ends);
    let (x, weight) = (x.into_primitive().tensor(), weight.into_primitive().tensor());
    let y = (functions.grouped_linear)(x, weight, ends.into_primitive());
    Tensor::from_primitive(TensorPrimitive::Float(y))
}

/// One linear without bias per group of rows, such as the experts of a mixture.
#[derive(Module, Debug)]
pub struct GroupedLinear<B: Backend> {
    /// `[G, K, N]`.
    pub weight: Param<Tensor<B, 3>>,
}

impl<B: Backend> GroupedLinear<B> {
    /// `groups` linears from `d_input` to `d_output` features.
    pub fn new(groups: usize, d_input: usize, d_output: usize, initializer: &Initializer, device: &B::Device) -> Self {
        let weight = initializer.init_with([groups, d_input, d_output], Some(d_input), Some(d_output), device);
        Self { weight }
    }

    /// [`grouped_linear`](crate::grouped_linear): x `[M, K]`, ends `[G]` → `[M, N]`.
    ///
    /// # Panics
    ///
    /// As [`grouped_linear`](crate::grouped_linear).
    pub fn forward(&self, x: Tensor<B, 2>, ends: Tensor<B, 1, Int>) -> Tensor<B, 2> {
        grouped_linear(x, self.weight.val(), ends)
    }
}
