//! [`Text`]: how text becomes a model's tokens.

use crate::{ChatTemplate, JobError, Message, Tokenizer};

/// A tokenizer, and the template of conversations where there is one.
#[derive(Debug)]
pub struct Text {
    /// The tokenizer.
    pub tokenizer: Tokenizer,
    /// The template.
    pub template: Option<ChatTemplate>,
    /// The template with the variables of prompts.
    pub prompts: Option<ChatTemplate>,
}

impl Text {
    /// What a model is to continue: `text`, or what the template makes of it if a user says it.
    ///
    /// # Errors
    /// [`JobError::NoTemplate`], [`JobError::Chat`], [`JobError::Tokenizer`].
    pub fn prompt(&self, text: &str, is_chat: bool) -> Result<Vec<u32>, JobError> {
        if !is_chat {
            return Ok(self.tokenizer.prompt(text)?);
        }
        let template = self.prompts.as_ref().ok_or(JobError::NoTemplate)?;
        Ok(template.prompt(&self.tokenizer, &[Message::new("user", text)])?)
    }

    /// The tokens at which generation ends: the tokenizer's, and that with which the template ends the assistant's turns.
    pub fn stop(&self) -> Vec<u32> {
        let mut stop = self.tokenizer.stop().to_vec();
        let end = self.template.as_ref().and_then(|template| template.turn_end(&self.tokenizer));
        stop.extend(end.filter(|end| !self.tokenizer.stop().contains(end)));
        stop
    }
}
