//! Tokens of tensor-parallel linears: gathers of x and dy, and sums of y and dx, around their GEMMs.
use std::sync::Arc;

use burn_backend::TensorMetadata;
use burn_backend::tensor::FloatTensor;
use burn_std::Shape;

use crate::backend::Float8Backend;
use crate::layer::Layer;
use crate::tensor::{ParallelHooks, parallel_of};
use crate::terms::Role;

/// Part of a linear on this rank; all of it, if ranks do not divide the linear.
pub(super) struct Tokens<'a, B: Float8Backend>(Option<&'a Arc<dyn ParallelHooks<B>>>);

impl<'a, B: Float8Backend> Tokens<'a, B> {
    pub(super) fn of(layer: &'a Layer) -> Self {
        Self(parallel_of(layer))
    }

    /// The ranks, if each has some tokens of x or dy.
    fn dividing(&self, role: Role) -> Option<&'a Arc<dyn ParallelHooks<B>>> {
        self.0.filter(|hooks| hooks.style().gathers(role))
    }

    /// Shape of x or dy with the tokens of all ranks. They are along the axis before the last.
    ///
    /// # Panics
    ///
    /// If a divided tensor has a single axis.
    pub(super) fn whole(&self, role: Role, own: &Shape) -> Shape {
        match self.dividing(role) {
            None => own.clone(),
            Some(hooks) => scaled(own, |tokens| tokens * hooks.ranks()),
        }
    }

    /// x or dy with the tokens of all ranks.
    pub(super) fn gathered(&self, role: Role, own: FloatTensor<B>) -> FloatTensor<B> {
        match self.dividing(role) {
            None => own,
            Some(hooks) => {
                let whole = self.whole(role, &own.shape());
                B::float_reshape(hooks.gather_rows(matrix::<B>(own)), whole)
            }
        }
    }

    /// Whether the product with all tokens is a term of the sum over ranks: y if ranks divide dy's
    /// tokens, dx if they divide x's.
    pub(super) fn sums(&self, role: Role) -> bool {
        self.dividing(role).is_some()
    }

    /// y or dx of this rank's tokens, from this rank's product with all tokens.
    pub(super) fn reduced(&self, role: Role, product: FloatTensor<B>) -> FloatTensor<B> {
        match self.dividing(role) {
            None => product,
            Some(hooks) => {
                let own = scaled(&product.shape(), |tokens| tokens / hooks.ranks());
                B::float_reshape(hooks.reduce_rows(matrix::<B>(product)), own)
            }
        }
    }
}

/// A tensor `[.., C]` as a matrix.
fn matrix<B: Float8Backend>(t: FloatTensor<B>) -> FloatTensor<B> {
    let shape = t.shape();
    let cols = shape[shape.num_dims() - 1];
    B::float_reshape(t, Shape::from(vec![shape.num_elements() / cols.max(1), cols]))
}

/// A shape with another length of the axis before the last.
fn scaled(shape: &Shape, length: impl FnOnce(usize) -> usize) -> Shape {
    let mut dims = shape.to_vec();
    let [.., tokens, _] = &mut dims[..] else {
        panic!("a tensor-parallel linear reads [.., tokens, features], not {dims:?}")
    };
    *tokens = length(*tokens);
    Shape::from(dims)
}
