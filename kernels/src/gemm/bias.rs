//! The bias of a GEMM on the device.

use cubecl::prelude::*;

use crate::load::{Geometry, GeometryLaunch, load_scalar};
use crate::source::Source;
use crate::view::Checked;

/// A vector to add to every row, or none.
#[derive(CubeType, CubeLaunch)]
pub(super) struct Bias {
    values: ComptimeOption<Array<u32>>,
    geometry: Geometry,
    #[cube(comptime)]
    source: Source,
}

impl<R: Runtime> BiasLaunch<R> {
    /// The kernel's argument for a checked bias.
    pub(super) fn of(bias: Option<&Checked>) -> Self {
        let geometry = bias.map_or_else(|| GeometryLaunch::new(0, 0, 0, 0, 0), Checked::geometry);
        Self::new(bias.map(Checked::array).into(), geometry, bias.map_or(Source::F32, |bias| bias.source))
    }
}

#[cube]
impl Bias {
    /// What is added to column `col`.
    pub(super) fn at(&self, col: u32) -> f32 {
        #[comptime]
        match &self.values {
            ComptimeOption::Some(values) => load_scalar(values, &self.geometry, col, comptime!(self.source)),
            ComptimeOption::None => f32::new(0.0),
        }
    }
}
