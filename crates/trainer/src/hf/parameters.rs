//! [`parameters`]: a model's parameters in the layout of files. Each is read from its device on
//! request.

use std::rc::Rc;

use anyhow::{Result, anyhow};
use burn::module::Module;
use burn::tensor::backend::Backend;
use burn::tensor::{DType, Shape, Tensor, TensorData, TensorPrimitive};
use burn_float8::shard_hooks::visit_params;

use super::names;

/// Parameter that is read on request.
pub(super) struct Parameter {
    /// Path in the module tree.
    pub(super) path: String,
    /// Shape in files; for a linear `[out, in]`.
    pub(super) shape: Vec<usize>,
    /// Reads its values in f32, row-major.
    pub(super) read: Read,
}

/// Reads a parameter from its device.
pub(super) type Read = Rc<dyn Fn() -> Result<Vec<f32>>>;

/// Parameters of `model` in the order of the module tree.
pub(super) fn parameters<B: Backend, M: Module<B>>(model: &M) -> Vec<Parameter> {
    const DOING: &str = "reading the weights";
    let mut parameters = vec![];
    visit_params::<B, M>(model, |param| {
        let (path, shape) = (param.name(), param.shape.to_vec());
        let Some(value) = param.float() else { return };
        let (shape, read): (_, Read) = match names::is_linear(&path) {
            true => {
                let tensor = Tensor::<B, 2>::from_primitive(TensorPrimitive::Float(value)).transpose();
                (tensor.dims().to_vec(), Rc::new(move || read(&tensor, DOING)))
            }
            false => {
                let flat = B::float_reshape(value, Shape::new([shape.iter().product()]));
                let tensor = Tensor::<B, 1>::from_primitive(TensorPrimitive::Float(flat));
                (shape, Rc::new(move || read(&tensor, DOING)))
            }
        };
        parameters.push(Parameter { path, shape, read });
    });
    parameters
}

/// Values of a tensor in f32, row-major. `doing` names the task in errors.
pub(super) fn read<B: Backend, const D: usize>(tensor: &Tensor<B, D>, doing: &'static str) -> Result<Vec<f32>> {
    let data = tensor.clone().try_into_data().map_err(|error| anyhow!("the device failed while {doing}: {error}"))?;
    data.convert::<f32>().into_vec().map_err(|error| anyhow!("the device failed while {doing}: {error:?}"))
}

/// Tensor `[cols, rows]` of the values `[rows, cols]`. Elements move and not only strides.
pub(super) fn transposed<B: Backend>(values: Vec<f32>, [rows, cols]: [usize; 2], device: &B::Device) -> Tensor<B, 2> {
    let stored = Tensor::<B, 2>::from_data(TensorData::new(values, [rows, cols]), (device, DType::F32));
    // Through one dimension.
    stored.transpose().reshape([rows * cols]).reshape([cols, rows])
}
