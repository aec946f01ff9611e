//! How a configuration opens its tokenizer and chat template.

use anyhow::{Result, bail};

use super::config::RunConfig;
use super::text::Text;
use crate::hf;
use crate::model::{ModelConfig, ModelSection};
use crate::{ByteTokenizer, ChatTemplate, Tokenizer};

/// Largest vocabulary that uses byte tokens by default.
const MAX_OF_BYTES: usize = 1 << 15;

impl<S: ModelSection> RunConfig<S> {
    /// Tokenizer of data and samples.
    ///
    /// # Errors
    /// A missing folder, a checkpoint without a tokenizer, and a tokenizer that cannot be read.
    pub fn tokenizer(&self) -> Result<Tokenizer> {
        let kept = self.assets.as_ref().filter(|folder| hf::has_tokenizer(folder));
        match (self.data.tokenizer.as_deref(), kept, self.model.hf_path()) {
            (Some(Tokenizer::BYTES), ..) => Ok(Tokenizer::bytes()),
            (_, Some(folder), _) => Ok(Tokenizer::from_folder(folder)?),
            (Some(name), ..) => Ok(Tokenizer::open(name)?),
            (None, None, None) => Ok(Tokenizer::bytes()),
            (None, None, Some(folder)) if !folder.is_dir() => bail!("there is no folder {}", folder.display()),
            (None, None, Some(folder)) if !hf::has_tokenizer(folder) => {
                bail!("no tokenizer in {}: set data.tokenizer to the path of one, or to \"bytes\"", folder.display())
            }
            (None, None, Some(folder)) => Ok(Tokenizer::from_folder(folder)?),
        }
    }

    /// Chat template, `data.chat_template` or the tokenizer's, with `data.chat_template_kwargs`.
    ///
    /// # Errors
    /// A chat template that cannot be read.
    pub fn chat_template(&self) -> Result<Option<ChatTemplate>> {
        let kwargs = &self.data.chat_template_kwargs;
        self.plain_template()?.map(|template| template.with_kwargs(kwargs)).transpose()
    }

    fn plain_template(&self) -> Result<Option<ChatTemplate>> {
        if let Some(folder) = &self.assets {
            return ChatTemplate::from_folder(folder);
        }
        if let Some(path) = &self.data.chat_template {
            return Ok(Some(ChatTemplate::from_file(path)?));
        }
        match (&self.data.tokenizer, self.model.hf_path()) {
            (Some(name), _) if name != Tokenizer::BYTES => Ok(ChatTemplate::of_tokenizer(name)?),
            (_, Some(folder)) => Ok(ChatTemplate::from_folder(folder)?),
            _ => Ok(None),
        }
    }

    /// Tokenizer and chat template.
    ///
    /// # Errors
    /// A large vocabulary without a tokenizer; the errors of [`tokenizer`](Self::tokenizer),
    /// [`chat_template`](Self::chat_template), [`dimensions`](Self::dimensions) and
    /// [`Tokenizer::for_vocabulary`].
    pub fn text(&self) -> Result<Text> {
        let (template, tokenizer) = (self.chat_template()?, self.tokenizer()?);
        let vocab_size = self.dimensions()?.size().vocab_size;
        let is_bytes = tokenizer.format() == Tokenizer::BYTES;
        // With random weights, bytes may be requested explicitly.
        let is_meant = self.data.tokenizer.is_some() && self.model.hf_path().is_none();
        if is_bytes && vocab_size > MAX_OF_BYTES && !is_meant {
            bail!(
                "the model has {vocab_size} tokens, and the tokenizer `bytes` has {}: set data.tokenizer to the path of the model's \
                 tokenizer, or for random weights to \"bytes\"",
                ByteTokenizer::VOCAB_SIZE
            );
        }
        Ok(Text { tokenizer: tokenizer.for_vocabulary(vocab_size)?, template })
    }
}
